"""Tools of all rooms: arguments and their errors, streams and locks, files, images; nothing of networks."""

"""``auxhead train`` run on the CPU, and the table that it ends with."""

from support.command_line import auxhead


def trained(*options, out="out"):
    result = auxhead("train", "--device", "cpu", "--out", out, *options)
    assert result.exit_code == 0, result.output + result.stderr
    return result


def rows(result):
    """The table at the end, accuracy by exit as printed; exits are counted from 0."""
    lines = [line.strip("│ ").split("│") for line in result.output.splitlines() if line.startswith("│")]
    assert [name.split(":")[0].strip() for name, _ in lines] == [str(index) for index in range(len(lines))]
    return {name.split(":")[1].strip(): share.strip() for name, share in lines}

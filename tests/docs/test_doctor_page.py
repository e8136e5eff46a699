"""What docs/doctor.md shows and says of a diagnosis is what the doctor prints and does."""

import re

from auxhead.autotune.doctor.script import CALLS, PROFILED, TIMED, WARM_UP, WATCHED
from support.command_line import tune
from support.documents import ROOT, Document

PAGE = Document("docs/doctor.md")


def test_the_diagnosis_shown_is_that_of_the_trace(tmp_path):
    (trace,) = re.findall(r"`auxhead-tune doctor (\S+\.json\.gz)` prints this and more", PAGE.text)
    printed = tune("doctor", "--out", str(tmp_path), str(ROOT / trace)).output
    shown = re.findall(r"^```text\n(.*?)^```$", PAGE.text, re.DOTALL | re.MULTILINE)[0]
    behind = 0
    for part in shown.split("[...]"):
        behind = printed.index(part.strip("\n "), behind)  # in its order


def test_a_script_ends_as_the_request_begins_that_the_page_names():
    PAGE.says(f"# a script, ended as its {CALLS}th request or step begins")
    parts = f"the first {WARM_UP} do not count, then {TIMED} are timed, {PROFILED} profiled and {WATCHED} watched."
    PAGE.says(f"Of a script's requests {parts}")

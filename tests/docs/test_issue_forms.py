"""Forms of issues are ones that GitHub takes, and ask for what the commands print."""

import re

import pytest
from support.documents import ROOT

FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
yaml = pytest.importorskip("yaml")


@pytest.mark.parametrize(
    ("name", "commands"), [("bug", ["auxhead --report"]), ("slow", ["auxhead --report", "auxhead-tune doctor"])]
)
def test_a_form_asks_for_what_the_commands_print(name: str, commands: list[str]) -> None:
    """See https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests."""
    form = yaml.safe_load((FORMS / f"{name}.yml").read_text())
    assert {*form} == {"name", "description", "labels", "body"} and form["name"] and form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]+", one) for one in ids)
    for part in form["body"]:
        assert {*part} <= {"type", "id", "attributes", "validations"} and part["type"] == "textarea"
        assert {*part["attributes"]} <= {"label", "description", "render"} and part["attributes"]["label"]
    wanted = {part["attributes"]["label"] for part in form["body"] if part["validations"] == {"required": True}}
    assert {f"What `{command}` prints" for command in commands} <= wanted


def test_the_page_of_new_issues_is_set_up() -> None:
    assert yaml.safe_load((FORMS / "config.yml").read_text()) == {"blank_issues_enabled": True}

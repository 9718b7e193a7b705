"""Problems in the report: each is shown once, in its place, even where the record has more or fewer fields."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from view_page import list_texts, read_pairs, read_report, read_table, read_text
from view_runs import CAUSE, make_incident, make_step, open_directory

from steadygrad.facts import Action, Cause, Incident, Outcome, Severity
from steadygrad.record.encode import to_json
from steadygrad.record.rank_file import RankFile


def report(path: Path, *incidents: Incident) -> Element:
    """Return the report of a run with these incidents."""
    directory = open_directory(path)
    directory.write_step(make_step(0))
    for incident in incidents:
        directory.write_incident(incident)
    directory.close()
    return read_report(path)


def report_row(path: Path, row: dict[str, Any]) -> Element:
    """Return the report of a run whose record has this line, perhaps from another version."""
    open_directory(path).close()
    (path / "incidents.jsonl").write_text(json.dumps(row) + "\n")
    return read_report(path)


def report_cause(path: Path, **changes: Any) -> Element:
    """Return how the report shows a cause with these fields."""
    row = json.loads(to_json(make_incident(3, cause=Cause(kind="nan", phase="forward"))))
    row["cause"] |= changes
    (section,) = report_row(path, row).findall(".//section[@class='cause']")
    return section


def find_one(page: Element) -> Element:
    (incident,) = page.findall(".//details[@class='incident']")
    return incident


# --- the folded line ------------------------------------------------------------------------------------------------


def test_a_folded_incident_shows_severity_step_message_and_action(tmp_path: Path) -> None:
    incident = find_one(report(tmp_path, make_incident(1200, message="the loss is NaN")))
    assert list_texts(incident, "summary/*") == ["error", "step 1,200", "the loss is NaN", "the step was skipped"]
    assert incident.get("data-step") == "1200"
    assert incident.get("open") is None


def test_a_folded_incident_with_a_known_cause_shows_it_and_its_line(tmp_path: Path) -> None:
    incident = find_one(report(tmp_path, make_incident(7, cause=CAUSE)))
    assert list_texts(incident, "summary/*")[2:4] == ["NaN gradient, born in the backward of aten.sqrt", "model.py:41"]


def test_without_an_action_the_line_says_so(tmp_path: Path) -> None:
    page = report(tmp_path, make_incident(4, action=Action.NONE))
    assert list_texts(page, ".//summary/span[@class='did']") == ["reported only"]


def test_the_rank_is_named_only_if_it_alone_reported_the_incident(tmp_path: Path) -> None:
    common = make_incident(5, kind="nonfinite_loss")
    directory = open_directory(tmp_path)
    files = [RankFile(tmp_path, rank, 2) for rank in range(2)]
    for sink in (directory, files[1]):
        sink.write_incident(common)
    files[1].write_incident(make_incident(6, kind="nonfinite_input"))
    for sink in (directory, *files):
        sink.close()

    shown = read_report(tmp_path).findall(".//details[@class='incident']")

    ranks = {
        dict(read_pairs(one, "div/dl"))["kind"]: list_texts(one, "summary/span[@class='badge rank']") for one in shown
    }
    assert ranks == {"nonfinite_loss": [], "nonfinite_input": ["rank 1"]}


def test_a_record_with_few_fields_is_shown_with_those(tmp_path: Path) -> None:
    page = report_row(tmp_path, {"step": 4})
    assert list_texts(find_one(page), "summary/*") == ["unknown", "step 4", "unknown", "reported only"]
    assert find_one(page).findall(".//section") == []


@pytest.mark.parametrize("severity", [*Severity, "catastrophic"])
def test_a_severity_has_its_colour_and_an_unknown_one_has_none(tmp_path: Path, severity: str) -> None:
    known = severity in list(Severity)
    page = report_row(tmp_path, {"step": 4, "finding": {"kind": "own_rule", "severity": severity}})
    badge = find_one(page).find("summary/span")
    assert badge is not None
    assert (badge.text, badge.get("class")) == (severity, f"badge {severity if known else 'unknown'}")


# --- one problem, many times ----------------------------------------------------------------------------------------


def test_repeated_incidents_with_one_cause_are_one_problem(tmp_path: Path) -> None:
    often = [make_incident(step, cause=dataclasses.replace(CAUSE, step=step)) for step in range(10, 310, 3)]
    page = report(tmp_path, *often, make_incident(400, cause=dataclasses.replace(CAUSE, line=99)))
    shown = page.findall(".//details[@class='incident']")
    assert [list_texts(one, "summary/*")[1:] for one in shown] == [
        [
            "100 times, steps 10 to 307",
            "NaN gradient, born in the backward of aten.sqrt",
            "model.py:41",
            "skipped 100×",
        ],
        ["step 400", "NaN gradient, born in the backward of aten.sqrt", "model.py:99", "the step was skipped"],
    ]
    assert list_texts(page, ".//div[@data-part='incidents']/p") == ["101 incidents, 2 problems."]
    assert len(page.findall(".//section[@class='cause']")) == 2


def test_the_first_and_newest_steps_of_a_problem_are_listed_with_all_findings(tmp_path: Path) -> None:
    other = make_incident(0, kind="nonfinite_input").finding
    page = report(tmp_path, *(dataclasses.replace(make_incident(step), also=(other,)) for step in range(20)))
    rows = read_table(find_one(page), "step")
    assert [row[0] for row in rows] == [*map(str, range(12)), "16", "17", "18", "19"]
    assert rows[0][1:4] == ["nonfinite_loss, nonfinite_input", "the step was skipped", "the loss is NaN"]


def test_problems_are_in_step_order_and_each_has_a_unique_address(tmp_path: Path) -> None:
    page = report(tmp_path, *(make_incident(step, kind=kind) for step, kind in ((7, "a"), (2, "b"), (9, "a"))))
    shown = page.findall(".//details[@class='incident']")
    assert [(one.get("id"), one.get("data-step"), one.get("data-steps")) for one in shown] == [
        ("run0-incident-0", "2", "2"),
        ("run0-incident-1", "7", "7 9"),
    ]


def test_two_runs_on_a_page_share_no_address(tmp_path: Path) -> None:
    for name in ("a", "b"):
        report(tmp_path / name, make_incident(3))
    ids = [one.get("id") for one in read_report(tmp_path / "a", tmp_path / "b").iter() if one.get("id")]
    assert len(set(ids)) == len(ids)


def test_of_very_many_problems_the_first_are_visible_and_the_rest_counted(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    lines = (to_json(make_incident(step, kind=f"kind{step % 120}")) + "\n" for step in range(1440))
    (tmp_path / "incidents.jsonl").write_text("".join(lines))
    (part,) = read_report(tmp_path).findall(".//div[@data-part='incidents']")
    assert len(part.findall("div/details[@class='incident']")) == 12
    assert read_text(part.find("div/details[@class='more']/summary")) == "88 more problems"
    assert list_texts(part, "p") == ["1,440 incidents, 100 problems.", "240 more incidents are in incidents.jsonl."]


def test_a_run_without_incidents_says_so(tmp_path: Path) -> None:
    (part,) = report(tmp_path).findall(".//div[@data-part='incidents']")
    assert read_text(part) == "No incidents."


# --- the unfolded incident ------------------------------------------------------------------------------------------


def test_an_unfolded_incident_shows_action_reason_and_fixes(tmp_path: Path) -> None:
    outcome = Outcome(action=Action.SCALE_LR, message="halved", before={"lr": 3e-4}, after={"lr": 1.5e-4})
    incident_made = make_incident(7)
    finding = dataclasses.replace(incident_made.finding, evidence={"loss": 9.25, "worst_layers": ["a", "b"]})
    incident = find_one(report(tmp_path, dataclasses.replace(incident_made, finding=finding, outcome=outcome)))
    assert read_pairs(incident, "div/dl") == [
        ("kind", "nonfinite_loss"),
        ("what was done", "halved"),
        ("reason", "it must not reach a weight"),
        ("before", "lr 0.0003"),
        ("after", "lr 0.00015"),
        ("what to change", "Add an epsilon before the square root."),
        ("loss", "9.25"),
        ("worst layers", "a, b"),
    ]


def test_unknown_fields_of_an_incident_have_no_line(tmp_path: Path) -> None:
    row = {
        "step": 3,
        "finding": {"kind": "own_rule", "advice": "", "evidence": [1, 2]},
        "outcome": {"action": "none", "message": "", "before": {}, "after": {}},
        "verdict": {"action": "none", "reason": ""},
        "cause": None,
    }
    incident = find_one(report_row(tmp_path, row))
    assert read_pairs(incident, "div/dl") == [("kind", "own_rule")]
    assert incident.findall("div/section") == []


# --- its cause ------------------------------------------------------------------------------------------------------


def test_each_field_of_a_cause_is_shown_once_under_a_readable_name(tmp_path: Path) -> None:
    (section,) = report(tmp_path, make_incident(7, cause=CAUSE)).findall(".//section[@class='cause']")
    assert read_pairs(section) == [
        ("seen", "NaN gradient"),
        ("phase", "backward"),
        ("operation", "aten.sqrt"),
        ("module", "blocks.1.attention"),
        ("autograd node", "SqrtBackward0"),
        ("called from", "train.py:12 loss = model(x)"),
        ("known as", "sqrt_at_zero"),
        ("samples of the batch", "3, 7"),
        ("about the samples", "2 of 8: the constant ones"),
        ("second replay", "the same NaN again"),
        ("batch kept in", "batches/step-200.safetensors"),
        ("limits", "one replay only"),
        ("rank", "0"),
    ]
    assert list_texts(section, "h5") == [
        "What to change",
        "Its inputs",
        "Terms of the loss",
        "From its origin to where it was noticed",
    ]
    assert list_texts(section, "ol/li") == list(CAUSE.chain)
    assert list_texts(section, "p") == [CAUSE.explanation]


def test_a_cause_with_few_fields_has_no_empty_lines_or_lists(tmp_path: Path) -> None:
    section = report_cause(tmp_path, growth=0, note="", samples=[], fixes=[], chain=None)
    assert [name for name in list_texts(section, "*") if name] == ["Cause", "phase forward factor a layer 0"]


@pytest.mark.parametrize(
    ("module", "shown"), [("encoder.norm", ["encoder.norm"]), ("", ["(the model itself)"]), (None, [])]
)
def test_a_cause_in_the_root_module_is_not_outside_of_any_module(
    tmp_path: Path, module: str | None, shown: list[str]
) -> None:
    section = report_cause(tmp_path, module=module)
    assert [value for name, value in read_pairs(section) if name == "module"] == shown


def test_an_op_in_a_custom_backward_is_shown_as_such(tmp_path: Path) -> None:
    section = report_cause(tmp_path, phase="backward", in_custom_backward=True)
    assert ("in a custom backward or hook", "yes") in read_pairs(section)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ({"file": "a/model.py", "line": 41, "source": "x.sqrt()"}, ("a/model.py:41", "x.sqrt()")),
        ({"file": "a/model.py"}, ("a/model.py", "")),
        ({"source": "x.sqrt()"}, ("", "x.sqrt()")),
        ({"line": 41}, None),
    ],
)
def test_the_location_of_a_cause_is_shown_as_far_as_known(
    tmp_path: Path, place: dict[str, Any], shown: tuple[str, str] | None
) -> None:
    figures = report_cause(tmp_path, **place).findall("figure")
    assert [(read_text(one.find("figcaption")), read_text(one.find("pre"))) for one in figures] == (
        [] if shown is None else [shown]
    )


def test_only_fixes_that_can_be_typed_look_like_code(tmp_path: Path) -> None:
    section = report_cause(tmp_path, fixes=["x.clamp(min=1e-6).sqrt()", "lower the learning rate"])
    assert list_texts(section, "ul/li") == ["x.clamp(min=1e-6).sqrt()", "lower the learning rate"]
    assert list_texts(section, "ul/li/code") == ["x.clamp(min=1e-6).sqrt()"]


@pytest.mark.parametrize("field", ["fixes", "inputs", "terms", "chain"])
def test_a_list_recorded_as_text_is_one_line(tmp_path: Path, field: str) -> None:
    section = report_cause(tmp_path, **{field: "add an epsilon"})
    assert [*list_texts(section, "ul/li"), *list_texts(section, "ol/li")] == ["add an epsilon"]

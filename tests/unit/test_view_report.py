"""The report: one file with everything in it, in which no text of a run can break the page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from view_runs import CAUSE, CONFIG, HOSTILE, add_update_ratios, make_incident, make_step, open_directory, write_run

from steadygrad import UsageError
from steadygrad.cli import main
from steadygrad.facts import Cause, Severity
from steadygrad.record.encode import to_json
from steadygrad.view.read import RunReader
from steadygrad.view.render.html import Html, join, tag, to_script_json
from steadygrad.view.render.incidents import LABELS, OWN_PLACE, is_code
from steadygrad.view.render.report import name_apart, render_report, write_report


class Page(HTMLParser):
    """A document as a browser sees it: its elements and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read_report(*paths: Path) -> Page:
    return Page(render_report([RunReader(path).read_all() for path in paths]))


def read_numbers(page: Page) -> dict[str, object]:
    return json.loads(next(script for script in page.scripts if script.startswith("{")))


# --- escaping -----------------------------------------------------------------------------------------------------


def test_plain_text_is_escaped_everywhere() -> None:
    assert tag("p", "<b>&", title='"<') == '<p title="&quot;&lt;">&lt;b&gt;&amp;</p>'
    assert join(["<", Html("<br>"), None]) == "&lt;<br>"


def test_json_cannot_end_its_script_element() -> None:
    spelled = to_script_json({"name": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(spelled)
    assert json.loads(spelled) == {"name": "</script><!--\u2028&"}


def test_html_in_names_messages_and_settings_stays_text(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "run", names=[HOSTILE], config={HOSTILE: HOSTILE})
    from view_runs import make_gradients

    directory.write_step(make_step(0))
    directory.write_layers(0, make_gradients(0, names=[HOSTILE]))
    cause = Cause(kind=HOSTILE, phase=HOSTILE, op=HOSTILE, file=HOSTILE, source=HOSTILE, fixes=(HOSTILE,))
    directory.write_incident(make_incident(0, kind=HOSTILE, message=HOSTILE, did=HOSTILE, cause=cause))
    directory.close()

    page = read_report(tmp_path / "run")

    assert [name for name, _ in page.elements].count("script") == 4
    assert "img" not in [name for name, _ in page.elements]
    assert not [attributes for _, attributes in page.elements if any(key.startswith("on") for key in attributes)]
    assert page.text.count("window.hacked=1") >= 8
    numbers = read_numbers(page)
    assert numbers["runs"]["run0"]["norms"]["names"] == [HOSTILE]  # type: ignore[index]


# --- its contents -------------------------------------------------------------------------------------------------


def test_every_field_of_a_cause_is_shown(tmp_path: Path) -> None:
    text = read_report(write_run(tmp_path)).text
    for name in Cause.__slots__:
        value = getattr(CAUSE, name)
        if value is None or value is False or name in ("kind", "step"):
            continue
        shown = ", ".join(map(str, value)) if name == "samples" else value
        for one in shown if isinstance(shown, tuple) else [shown]:
            assert " ".join(str(one).split()) in text, name
    assert set(LABELS) | set(OWN_PLACE) | {"rank"} == set(Cause.__slots__)


def test_an_unknown_field_is_shown(tmp_path: Path) -> None:
    incident = json.loads(to_json(make_incident(3, cause=CAUSE)))
    incident["cause"]["weather_in_the_lab"] = "hail"
    (tmp_path / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    assert "weather in the lab hail" in read_report(tmp_path).text


def test_the_charts_contain_the_run(tmp_path: Path) -> None:
    add_update_ratios(write_run(tmp_path))
    run = read_numbers(read_report(tmp_path))["runs"]["run0"]  # type: ignore[index]
    assert len(run["curves"]["loss"]["x"]) == 599
    assert max(run["curves"]["grad_norm"]["y"]) == 60.0
    assert run["threshold"] == 1.0
    marks = {mark["name"]: mark["x"] for mark in run["marks"]}
    assert marks == {
        "not finite": [200],
        "skipped": [200],
        "learning rate changed": [350],
        "jumped": [350],
        "rolled back": [420],
    }
    assert run["norms"]["names"][0] == "embed.weight"
    assert sum(map(len, run["norms"]["bad"])) == 1
    assert run["ratios"] is not None


def test_several_runs_are_compared_and_their_settings_too(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 60)
    directory = open_directory(tmp_path / "b", config={**CONFIG, "clip": {"kind": "fixed_norm", "max_norm": 0.25}})
    directory.write_step(make_step(0))
    directory.close()
    page = read_report(tmp_path / "a", tmp_path / "b")
    assert "setting that differs a b clip.max_norm 1 0.25" in page.text
    assert list(read_numbers(page)["runs"]) == ["run0", "run1"]  # type: ignore[call-overload]


def test_a_huge_list_of_incidents_stays_small(tmp_path: Path) -> None:
    lines = "".join(to_json(make_incident(step, cause=CAUSE)) + "\n" for step in range(20_000))
    (tmp_path / "incidents.jsonl").write_text(lines)
    text = render_report([RunReader(tmp_path).read_all()])
    assert len(text) < 500_000
    assert "20,000 incidents, 1 problem." in text


def test_a_long_run_has_few_points(tmp_path: Path) -> None:
    line = to_json(make_step(0)).removeprefix('{"step":0,')
    (tmp_path / "steps.jsonl").write_text("".join(f'{{"step":{step},{line}\n' for step in range(50_000)))
    run = RunReader(tmp_path).read_all()
    assert run.steps.num_steps == 50_000
    assert len(render_report([run])) < 1_000_000


# --- the file -----------------------------------------------------------------------------------------------------


def test_the_document_runs_only_its_own_scripts_and_fetches_nothing(tmp_path: Path) -> None:
    page = Page(render_report([RunReader(write_run(tmp_path, 30)).read_all()]))
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    code = [script for script in page.scripts if not script.startswith("{")]
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    links = [
        a for name, a in page.elements if "src" in a or ("href" in a and not str(a["href"]).startswith(("#", "data:")))
    ]
    assert links == []


def test_the_command_writes_one_file_and_prints_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 50)
    target = tmp_path / "out" / "report.html"
    target.parent.mkdir()
    assert main(["report", str(tmp_path / "run"), "-o", str(target)]) == 0
    assert "run: Healthy. 50 steps, none skipped" in capsys.readouterr().out
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    assert target.stat().st_size < 200_000


def test_without_a_name_the_report_is_written_into_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_a_failed_report_prints_an_error_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path / "r.html")]) == 2
    assert "There is no" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is a folder"):
        write_report([write_run(tmp_path / "run", 5)], tmp_path)
    with pytest.raises(UsageError, match="There is no folder"):
        write_report([tmp_path / "run"], tmp_path / "nowhere" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_runs_gives_a_report_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "deep/c"):
        write_run(tmp_path / "runs" / name, 5)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "all.html")]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()][:3] == ["a", "b", "c"]


def test_for_very_many_runs_only_the_comparison_is_written(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{i}", 300) for i in range(13)]
    write_report(runs, tmp_path / "all.html")
    page = Page((tmp_path / "all.html").read_text(encoding="utf-8"))
    assert "article" not in [name for name, _ in page.elements]
    assert [a.get("data-show") for _, a in page.elements if a.get("data-show")] == [f"run{i}" for i in range(13)]
    assert "A report of fewer runs shows each of them in full" in page.text


def test_the_command_sends_no_escape_sequence_of_a_run_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run\x1b[2J"
    directory = open_directory(path)
    directory.write_step(make_step(0))
    cause = dataclasses.replace(CAUSE, symptom="\x1b]0;title\x07", op="\x1b[31mred")
    directory.write_incident(make_incident(0, cause=cause))
    directory.close()

    assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 0

    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_report_is_a_complete_page(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not end in \.html"):
        write_report([write_run(tmp_path / "run", 5)], tmp_path / "report.pdf")


def test_steps_that_were_not_replayed_are_listed_with_those_that_were(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0))
    for step in range(1, 40):
        directory.write_incident(make_incident(step, cause=CAUSE if step % 10 == 1 else None))
    directory.close()
    text = read_report(tmp_path).text
    story = text[text.index("What broke") : text.index("largest norm")]
    assert "4 times, steps 1 to 31; 35 more of this kind were not replayed NaN gradient" in story
    assert "the loss is NaN" not in story


def test_the_failure_is_above_the_numbers_with_its_line_and_the_recovery(tmp_path: Path) -> None:
    text = read_report(write_run(tmp_path)).text
    story = text[text.index("What broke") : text.index("largest norm")]
    assert "step 200 NaN gradient, born in the backward of aten.sqrt model.py:41 scale = x.var(dim=-1).sqrt()" in story
    assert "Done: the step was skipped" in story
    assert "step 420 the loss has been rising for 64 steps Done: back to step 400" in story
    assert "Healthy since step 421: 179 steps." in story
    assert text.index("What broke") < text.index("Incidents") < text.index("Gradient norms by parameter")


def test_no_part_of_a_run_that_began_by_exploding_is_called_healthy(tmp_path: Path) -> None:
    directory = open_directory(write_run(tmp_path))
    directory.write_incident(make_incident(3, kind="exploded_start", severity=Severity.WARNING))
    directory.close()
    assert "Healthy" not in read_report(tmp_path).text


def test_reports_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from steadygrad.cli import main; "
        f"sys.exit(main(['report', {str(write_run(tmp_path, 5))!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/guarded", "y/guarded"], ["x/guarded", "y/guarded"]),
        (["x/1/guarded", "y/1/guarded", "z"], ["x/1/guarded", "y/1/guarded", "{here}/{parent}/z"]),
        (["runs/a", "runs/a"], ["a", "a"]),
    ],
)
def test_runs_with_the_same_name_are_distinguished_by_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], names: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    here = {"here": tmp_path.parent.name, "parent": tmp_path.name}
    assert name_apart([Path(path) for path in paths]) == [name.format(**here) for name in names]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("torch.where(x > 0, x, 1.0).sqrt()", True),
        ("x / (x.norm() + eps)", True),
        ("lower the learning rate", False),
        ("float32", False),
        ("(" * 5000, False),
        ("x\0y", False),
    ],
)
def test_a_fix_that_can_be_typed_looks_like_code(text: str, code: bool) -> None:
    assert is_code(text) is code

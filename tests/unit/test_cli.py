"""The command line: exit codes, help, which command loads what, what doctor finds, how the console writes."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steadygrad import Precision, __version__
from steadygrad.act.precision import half_matmul_works
from steadygrad.cli import doctor, machine, main
from steadygrad.cli.console import Console
from steadygrad.cli.doctor import advise, find_problems
from steadygrad.cli.machine import Device, Machine, examine_machine, find_fused_optimizers, parse_version

CPU = Device(
    name="cpu",
    description="A CPU",
    capability="AVX512",
    memory_bytes=None,
    precision=Precision.FP32,
    fused_optimizers=("Adam", "AdamW"),
)
GPU = Device(
    name="cuda:0",
    description="A GPU",
    capability="9.0",
    memory_bytes=80 << 30,
    precision=Precision.BF16,
    fused_optimizers=("Adam", "AdamW", "SGD"),
)
HEALTHY = Machine(
    steadygrad=__version__,
    python="3.12.3",
    system="Linux",
    torch="2.13.0+cpu",
    cuda=None,
    devices=(CPU,),
    bf16_matmul_works=True,
    fp16_matmul_works=True,
    onednn_max_cpu_isa=None,
    isa_cap_helps=None,
    triton=None,
    triton_is_usable=False,
    min_triton="3.6",
    num_cpus=2,
    num_threads=2,
    has_nvidia_driver=False,
    steadygrad_is_off=False,
    warnings=(),
)
SICK = dataclasses.replace(HEALTHY, bf16_matmul_works=False, fp16_matmul_works=False, isa_cap_helps=True)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


# --- the command line itself --------------------------------------------------------------------------------------


COMMANDS = ["clean", "demo", "diagnose", "doctor", "plot", "report", "run", "scan", "view", "watch"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    example = "\n".join(["Example:", " ".join(["    steadygrad", *command])])
    assert example in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["dmeo"], ["doctor", "--jsno"], ["demo", "--run-dir"], ["demo", "extra"]])
def test_an_unknown_command_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train", "seo"], ["train", "mmdit"], ["run"], ["tune", "seo"]])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("protekt = true", ": unknown; "),
        ("protekt = ", "not valid TOML: "),
        ("protekt = 1\nclipp = 1", "2 wrong fields"),
    ],
)
def test_every_command_names_a_wrong_config_file(
    command: list[str], text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)

    assert main([*command, "--config", str(file), *(["script.py"] if command == ["run"] else [])]) == 2

    said = capsys.readouterr().err
    assert f"{file}: " in said
    assert expected in said


def test_an_unknown_command_is_answered_with_the_nearest_or_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repot", "runs/a"]) == 2
    assert "there is no command 'repot'. Did you mean report?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "There are demo, doctor, scan" in capsys.readouterr().err


def test_python_m_runs_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steadygrad", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["steadygrad,", "version", __version__])


def test_help_loads_neither_torch_nor_rich() -> None:
    code = "import sys; from steadygrad.cli import main; main(['--help']); print({'torch', 'rich'} & set(sys.modules))"
    assert run_python("-c", code).stdout.splitlines()[-1] == "set()"


def test_missing_click_is_reported() -> None:
    code = "import sys; sys.modules['click'] = None; from steadygrad.cli import main; sys.exit(main([]))"
    done = run_python("-c", code)
    assert done.returncode == 2
    assert "needs click" in done.stderr


def test_missing_torch_is_reported() -> None:
    code = "import sys; sys.modules['torch'] = None; from steadygrad.cli import main; sys.exit(main(['doctor']))"
    done = run_python("-c", code)
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_is_not_reported_as_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down() -> Machine:
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "examine_machine", break_down)
    assert main(["doctor"]) == 2
    assert "a defect" in capsys.readouterr().err


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_prints_the_same_as_json_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["problems"] else 0)
    assert found["healthy"] == (not found["problems"])
    assert found["devices"][0]["name"] == "cpu"
    assert found["devices"][0]["precision"] in {"bf16", "fp32"}

    assert main(["doctor"]) == code
    said = capsys.readouterr().out
    for sentence in [*found["advice"], *(problem["found"] for problem in found["problems"])]:
        assert sentence in said
    assert found["torch"] in said


def test_doctor_reports_what_torch_reports() -> None:
    import torch

    machine = examine_machine()
    assert machine.torch == torch.__version__
    assert machine.num_threads == torch.get_num_threads()
    assert len(machine.devices) == 1 + (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert {"Adam", "AdamW", "SGD"} <= set(machine.devices[0].fused_optimizers)


def test_optimizers_without_a_fused_step_are_not_offered() -> None:
    assert "Adadelta" not in find_fused_optimizers("cpu")


def test_a_healthy_machine_has_nothing_to_fix() -> None:
    assert find_problems(HEALTHY) == []


@pytest.mark.parametrize(
    ("machine", "found", "fix"),
    [
        (SICK, "bf16 and fp16 matmul", "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (dataclasses.replace(SICK, isa_cap_helps=False), "bf16 and fp16 matmul", "train in fp32"),
        (dataclasses.replace(SICK, fp16_matmul_works=True), "A bf16 matmul", "ONEDNN_MAX_CPU_ISA"),
        (dataclasses.replace(HEALTHY, torch="2.5.1+cpu"), "torch 2.5.1+cpu is older than 2.6", "torch>=2.6"),
        (dataclasses.replace(HEALTHY, steadygrad_is_off=True), "STEADYGRAD=off", "unset"),
        (dataclasses.replace(HEALTHY, num_threads=8), "8 threads on 2 cores", "OMP_NUM_THREADS=2"),
        (dataclasses.replace(HEALTHY, has_nvidia_driver=True), "built without CUDA", "CUDA build"),
        (dataclasses.replace(HEALTHY, has_nvidia_driver=True, cuda="13.0"), "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (dataclasses.replace(HEALTHY, devices=(CPU, GPU)), "Triton is not installed", "triton>=3.6"),
        (dataclasses.replace(HEALTHY, devices=(CPU, GPU), triton="3.2.0"), "Triton is 3.2.0, too old", "triton>=3.6"),
    ],
)
def test_each_problem_comes_with_its_fix(machine: Machine, found: str, fix: str) -> None:
    (problem,) = find_problems(machine)
    assert found in problem.found
    assert fix in problem.fix


def test_a_problem_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine_machine", lambda: SICK)
    assert main(["doctor"]) == 1
    assert "bf16 DIES, fp16 DIES" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_advice_names_precision_and_fused_optimizers() -> None:
    old = dataclasses.replace(GPU, name="cuda:1", precision=Precision.FP16)
    machine = dataclasses.replace(HEALTHY, devices=(CPU, GPU, old), triton="3.9.0", triton_is_usable=True)
    advice = " ".join(advise(machine))
    assert "On cpu train in fp32." in advice
    assert "On cuda:0 train in bf16, without a GradScaler" in advice
    assert "scaler=conservative_scaler()" in advice
    assert "fused=True (Adam, AdamW, SGD)" in advice
    assert "Triton 3.9.0" in advice


@pytest.mark.parametrize(("version", "parsed"), [("2.13.0+cpu", (2, 13)), ("3.6", (3, 6)), ("2.6.0a0+git1", (2, 6))])
def test_versions_are_compared_as_numbers(version: str, parsed: tuple[int, ...]) -> None:
    assert parse_version(version) == parsed


# --- the console --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_something(console: Console) -> None:
    console.say("a [bold] line", "red")
    console.show_table(("run", "loss"), [("clean", "0.1"), ("bad", "nan")], ["", "red"])
    with console.track("training", 2) as advance:
        advance(1, "loss 0.1")


def test_a_file_gets_plain_text() -> None:
    file = io.StringIO()
    write_something(Console(file))
    assert file.getvalue() == "a [bold] line\nrun    loss\nclean   0.1\nbad     nan\n"


def test_a_terminal_gets_colours_and_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    write_something(Console(file))
    assert "\x1b[31ma [bold] line" in file.getvalue()
    assert "1/2" in file.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    write_something(Console(file))
    assert "a [bold] line" in file.getvalue()
    assert "\x1b[3" not in file.getvalue()


def test_characters_that_a_file_cannot_encode_are_replaced() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    Console(file).say("‖g‖ = 1")
    file.flush()
    assert raw.getvalue() == b"?g? = 1\n"


@pytest.mark.parametrize("probe", [half_matmul_works.__wrapped__, lambda _: machine._isa_cap_helps()])
def test_probing_the_machine_runs_no_module_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: Callable[[Precision], bool]
) -> None:
    for name in ("torch", "steadygrad"):
        (tmp_path / f"{name}.py").write_text("open('trace', 'w'); raise ImportError")
    monkeypatch.chdir(tmp_path)

    probe(Precision.BF16)

    assert not (tmp_path / "trace").exists()

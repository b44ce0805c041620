"""The census finds mixed devices, host synchronisations, copies and launches, with their lines."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from tests.fake_cuda.__main__ import main
from tests.fake_cuda.library import load_library


def operations() -> tuple[list, dict]:
    import torch

    from tests.fake_cuda.census import fake_cuda

    host = torch.arange(5)
    with fake_cuda() as recorder:
        device = host.to("cuda")
        known = [device.tolist(), (device + 1)[1:3].tolist(), [*device.nonzero().shape], int(device[4])]
        numbers = torch.zeros(3, device="cuda")
        numbers[device[:2]] = 1
        known.append(numbers.tolist())
        numbers.cpu()
    census = recorder.census
    short = {name: {line.split(" at ")[0]: n for line, n in getattr(census, name).items()} for name in
             ("mismatches", "synchronisations", "copies", "launches")}
    return known, short


def test_index_tensors_have_values_and_everything_is_counted(on_fake_cuda: Callable) -> None:
    known, counted = on_fake_cuda(operations)
    assert known == [[0, 1, 2, 3, 4], [2, 3], [4, 1], 4, [1.0, 1.0, 1.0]]
    assert counted == {
        "mismatches": {},
        "synchronisations": {"tolist": 3, "nonzero": 1, "_local_scalar_dense": 1, "_to_copy": 2},
        "copies": {"cpu -> cuda [5] _to_copy": 1, "cuda -> cpu [3] _to_copy": 1},
        "launches": {"_to_copy": 2, "add": 1, "nonzero": 1, "zeros": 1, "index_put_": 1},
    }


def mixed() -> tuple[list, bool]:
    import torch

    from tests.fake_cuda.census import fake_cuda

    with fake_cuda() as recorder:
        raised = False
        try:
            torch.ones(3, device="cuda") + torch.ones(3)
        except RuntimeError:
            raised = True
    return [*recorder.census.mismatches], raised


def test_tensors_of_two_devices_are_found(on_fake_cuda: Callable) -> None:
    (line,), raised = on_fake_cuda(mixed)
    assert raised and line.startswith("add at ") and "cuda:0 and cpu" in line


def test_a_process_that_has_torch_is_refused() -> None:
    with pytest.raises(UsageError, match="before torch"):
        load_library()


def printed(arguments: list[str]) -> tuple[int, str]:
    """The exit status of the command in this process, and what it prints."""
    from tests.fake_cuda.__main__ import main

    with redirect_stdout(StringIO()) as out:
        return main(arguments), out.getvalue()


def test_the_command_prints_a_census(tmp_path: Path, on_fake_cuda: Callable, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\nlayers = 1\n[data]\nsource = "synthetic"\nsequence_length = 64\n[train]\nglobal_batch = 1\n'
        "[parallel]\ntp = 2\nmicro_batch = 1\n"
    )
    # The library is loaded before torch, so the command may not import torch by itself.
    says = "import sys, tests.fake_cuda.__main__ as command; command.load_config(sys.argv[1]); "
    says += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", says, str(run)], timeout=100, check=True)
    code, said = on_fake_cuda(printed, [str(run), "--rank", "1", "--step", "0", "--most", "1"])
    assert code == 0 and said.startswith("mismatches: 0\nsynchronisations: ") and "\nlaunches: " in said
    assert main(["no.toml"]) == 2
    assert capsys.readouterr().err == "no such file: no.toml\n"

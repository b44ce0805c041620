"""The house: a file imports only from its own floor and those below: what is below never knows what is above."""

import ast
from pathlib import Path

import pytest

SHOAL = Path(__file__).parents[1] / "shoal"
FLOORS = (
    ("config", "options", "mistyped", "layout", "errors", "files", "stdout", "pieces", "catalog"),
    ("models", "optim", "precision", "data"),
    ("cost", "comm"),
    ("parallel", "pipeline", "checkpoint"),
    ("train", "verify", "bench", "simulate", "report", "plan", "validate", "failover"),
    ("cli", "cli_options", "__main__"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in SHOAL.rglob("*.py") if path.parent != SHOAL or path.stem != "__init__")


def imported(source: str) -> set[str]:
    """The rooms of shoal that a file imports from, anywhere in it; those that only annotations need among them."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "shoal imports by whole names"
            modules += [f"{node.module}.{name.name}" for name in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("shoal.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SHOAL)))
def test_no_file_imports_from_a_higher_floor(path: Path) -> None:
    room = path.relative_to(SHOAL).parts[0].removesuffix(".py")
    above = {other for other in imported(path.read_text()) if FLOOR[other] > FLOOR[room]}
    assert not above, f"floor {FLOOR[room]} imports from {', '.join(sorted(above))}"

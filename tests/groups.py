"""Files of tests that one process of ``pytest -n`` runs, since they share what takes seconds to start."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

GROUPS = {
    "a browser, and the lab's server": (
        "tests/labs/interactive/", "tests/report/test_watch.py", "tests/docs/test_pictures.py",
        "tests/docs/test_site.py",
    ),
    "a process with a fake CUDA device": ("tests/fake_cuda/", "tests/labs/bench/gpu/test_fake_cuda.py"),
    "a process with Triton's interpreter": ("tests/engine/kernels/",),
    "ranks that have compiled before": (
        "tests/engine/parallel/test_float8.py", "tests/engine/parallel/test_float8_on_hardware.py",
        "tests/engine/parallel/test_fused.py", "tests/training/step/test_engine.py",
    ),
    "a run of the command line on 4 ranks": (
        "tests/cli/run/test_train.py", "tests/training/test_hugging_face_refusals.py", "tests/training/test_resume.py",
    ),
}  # fmt: skip
"""What is shared, and the files and folders that use it. Another file is a group of its own."""


def find_group(test: str) -> str:
    """Return the group of a test, given its id ``FILE::NAME``."""
    file = test.partition("::")[0]
    return next((group for group, files in GROUPS.items() if file.startswith(files)), file)

"""Lines that a full disk delays."""

import os

from shoal.base.journal import Journal


def test_a_full_disk_delays_lines_and_is_reported_once(tmp_path, monkeypatch):
    said, write, space = [], os.write, 10**9
    journal = Journal(tmp_path / "lines", said.append)

    def limited(end: int, data: bytes) -> int:
        nonlocal space
        if not space:
            raise OSError(28, "No space left on device")
        count = min(space, len(data))
        space -= count
        return write(end, data[:count])

    monkeypatch.setattr(os, "write", limited)
    for number in range(5):
        space = 4 if number in (1, 2) else 10**9 if number == 4 else 0 if number == 3 else space
        journal.append(f"line {number}\n")
    assert (tmp_path / "lines").read_text() == "".join(f"line {number}\n" for number in range(5))
    assert len(said) == 1 and f"{tmp_path / 'lines'} cannot be written: No space left on device." in said[0]

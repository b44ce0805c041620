"""How fast the lab answers. Run with ``-s`` to see the times of this machine."""

import re
import subprocess
import sys
import time

import numpy as np

from shoal.labs.interactive.layout import FIRST
from shoal.labs.interactive.panels import call_panel

LARGE = FIRST | {"model": "llama-3-405b", "cluster": "2048x8xH100", "global_batch": "16M"}
"""16,384 devices."""
VALUES = {
    "zero": (0, 1, 2, 3), "tp": (1, 2, 4, 8), "cp": (1, 2, 4), "pp": (2, 4, 8, 16), "micro_batch": (1, 2, 4),
    "recompute": ("none", "selective", "full"), "schedule": ("1f1b", "zb-h1", "interleaved-1f1b"),
}  # fmt: skip

MOVE_SLIDERS = """async (rounds) => {
  const shown = document.querySelector(".headline .tiles"), times = [];
  for (let i = 0; i < rounds; i++) {
    for (const name of ["ZeRO stage", "cp · context parallel", "pp · pipeline parallel", "Micro-batch"]) {
      const sliders = [...document.querySelectorAll("input[type=range]")];
      const slider = sliders.find((each) => each.labels[0].textContent === name);
      slider.value = slider.valueAsNumber ? slider.valueAsNumber - 1 : 1;
      const answered = new Promise((done) => {
        const watch = new MutationObserver(() => { watch.disconnect(); requestAnimationFrame(() => done()); });
        watch.observe(document.querySelector(".headline"), { childList: true, subtree: true });
      });
      const begin = performance.now();
      slider.dispatchEvent(new Event("input"));
      await answered;
      times.push(performance.now() - begin);
    }
  }
  return times;
}"""
"""Moves sliders; returns milliseconds from each move to the frame that shows its answer."""


def test_a_move_of_16384_devices_takes_under_100_ms_of_one_core():
    call_panel("layout", LARGE)
    times = []
    for name, values in VALUES.items():
        for value in values:
            parallel = FIRST["parallel"] | {"pp": 16} | {name: value}
            begin = time.thread_time()
            call_panel("layout", LARGE | {"parallel": parallel})
            times.append(time.thread_time() - begin)
    print(f"\nanswer for 16,384 devices, CPU time: {_describe(1e3 * np.array(times))}")
    # The median: other tests share the caches, and stretch single moves by half.
    assert np.median(times) < 0.1 and np.percentile(times, 95) < 0.15


def test_a_move_in_the_browser(panel):
    page = panel("layout?model=llama-3-405b&cluster=2048x8xH100&global_batch=16M&pp=16&recompute=full", "#step b")
    page.evaluate(MOVE_SLIDERS, 1)
    times = page.evaluate(MOVE_SLIDERS, 3)
    print(f"\nslider to picture for 16,384 devices: {_describe(np.array(times))}")
    assert np.median(times) < 1000  # a machine that does much else besides


def test_the_first_picture(page):
    begin = time.monotonic()
    words = [sys.executable, "-m", "shoal", "lab", "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        try:
            url = started.stdout.readline().strip()
            assert re.match(r"http://127\.0\.0\.1:", url)
            page.goto(url)
            page.wait_for_selector("#step b")
            print(f"\nfrom the command to the first picture: {time.monotonic() - begin:.2f} s")
        finally:
            started.terminate()
    assert time.monotonic() - begin < 30


def _describe(milliseconds: np.ndarray) -> str:
    median, high = np.percentile(milliseconds, [50, 95])
    return f"median {median:.0f} ms, p95 {high:.0f} ms of {len(milliseconds)} moves"

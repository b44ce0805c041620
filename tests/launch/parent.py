"""The parent of two such ranks, as a process of its own."""

import json
import os
import sys
from pathlib import Path

from shoal.launch.local_launcher import start_rank_server
from shoal.spec.config import build_config
from tests.launch.test_local_launcher import launch

if __name__ == "__main__":
    payload = json.loads(os.environ["PAYLOAD"])
    with start_rank_server(build_config({"parallel": {"dp": 2}}), "cpu") as server:
        sys.exit(launch(server, payload, Path(payload["folder"]) / "logs"))

# An image of shoal for NVIDIA GPUs. Build it with `docker build -t shoal .`, and start it with the GPUs and shared memory:
#
#     docker run --gpus all --ipc host --volume "$PWD:/work" shoal train run.toml
#
# torch's CUDA build brings its CUDA libraries; the driver on the host must support their version (13.0: 580 or newer).
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

# A C compiler: torch.compile and Triton build launchers when they first run.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shoal
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt torch
COPY shoal shoal
RUN /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt .

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["shoal"]
CMD ["--help"]

# GPU image: training ranks in the container's own Python, SGLang servers in /opt/sglang.
# NOT RUN: no GPU was at hand.  Build:  docker build -t megatron_rl .
#
# Two environments because SGLang pins its torch exactly and NGC builds its own.  With rollout.push = "distributed" the
# ranks and the servers form one NCCL communicator, and NCCL refuses unequal versions: the last step prints both.
ARG NGC_TAG=26.05-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}

# Servers.  PIP_CONSTRAINT is NGC's list for its own Python; it must not reach this environment.
COPY requirements-sglang.txt /opt/megatron_rl/
RUN python3 -m venv /opt/sglang \
    && env -u PIP_CONSTRAINT /opt/sglang/bin/pip install --no-cache-dir -r /opt/megatron_rl/requirements-sglang.txt

# Training ranks.  torch is pinned to what the image has, so that no requirement can replace it.
COPY requirements.txt /opt/megatron_rl/
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
    && pip install --no-cache-dir -c /tmp/torch.txt -r /opt/megatron_rl/requirements.txt

WORKDIR /opt/megatron_rl
COPY . .
RUN pip install --no-cache-dir --no-deps -e .

RUN for python in python /opt/sglang/bin/python; do \
        "$python" -c "import torch; print(torch.__version__, 'NCCL', torch.cuda.nccl.version())"; \
    done
CMD ["python", "-m", "tools.doctor"]

# GPU image: training ranks in the container's own Python, SGLang servers in /opt/sglang.
# NOT BUILT: no registry and no GPU were at hand.  What stands here was linted (hadolint), the versions it pins exist, and
# tools/image_packages.py is tested.  Build:  docker build -t megatron_rl .
#
# Two environments because SGLang pins its torch exactly and NGC builds its own.  With rollout.weight_sync = "distributed" the
# ranks and the servers form one NCCL communicator, and NCCL refuses unequal versions: the build prints both.
ARG NGC_TAG=26.05-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}
WORKDIR /opt/megatron_rl

# Servers.  PIP_CONSTRAINT is NGC's list for its own Python; it must not reach this environment.
COPY requirements-sglang.txt ./
RUN python3 -m venv /opt/sglang \
    && env -u PIP_CONSTRAINT /opt/sglang/bin/pip install --no-cache-dir -r requirements-sglang.txt

# Training ranks.  torch, transformer-engine, apex and what else the image is built around are frozen as they are: a
# requirement that would replace one ends the build.
COPY requirements.txt ./
COPY tools/image_packages.py tools/
RUN python tools/image_packages.py > constraints.txt \
    && env -u PIP_CONSTRAINT pip install --no-cache-dir -c constraints.txt -r requirements.txt \
    && python tools/image_packages.py --same constraints.txt

# Ourselves; then what the two environments hold, and whether it fits together.  A build has no GPU: the doctor says so and
# goes on.  Ask it again where the image runs.
COPY . .
RUN pip install --no-cache-dir --no-deps -e . \
    && for python in python /opt/sglang/bin/python; do \
        "$python" -c "import torch; print(torch.__version__, 'NCCL', torch.cuda.nccl.version())" || exit 1; \
    done \
    && python -m tools.doctor --build

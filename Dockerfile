# GPU image: training ranks in the container's own Python, SGLang servers in /opt/sglang.
# NOT BUILT: no registry and no GPU were available.  This file was linted (hadolint), the pinned versions exist, and
# tools/image_packages.py is tested.  Build:  docker build -t megatron_rl .
#
# Two environments, because SGLang pins its torch exactly and NGC builds its own.  With rollout.weight_sync = "distributed"
# ranks and servers form one NCCL communicator, and NCCL refuses different versions: the build prints both.
ARG NGC_TAG=26.05-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}
WORKDIR /opt/megatron_rl

# Servers.  PIP_CONSTRAINT is NGC's list for its own Python; it must not apply to this environment.
COPY requirements-sglang.txt ./
RUN python3 -m venv /opt/sglang \
    && env -u PIP_CONSTRAINT /opt/sglang/bin/pip install --no-cache-dir -r requirements-sglang.txt

# Training ranks.  torch, transformer-engine, apex and the image's other core packages are frozen: a requirement that would
# replace one fails the build.
COPY requirements.txt ./
COPY tools/image_packages.py tools/
RUN python tools/image_packages.py > constraints.txt \
    && env -u PIP_CONSTRAINT pip install --no-cache-dir -c constraints.txt -r requirements.txt \
    && python tools/image_packages.py --same constraints.txt

# This project; then the versions of both environments, and the doctor's checks.  A build has no GPU: the doctor warns and
# continues.  Run it again where the image runs.
COPY . .
RUN pip install --no-cache-dir --no-deps -e . \
    && for python in python /opt/sglang/bin/python; do \
        "$python" -c "import torch; print(torch.__version__, 'NCCL', torch.cuda.nccl.version())" || exit 1; \
    done \
    && python -m tools.doctor --build

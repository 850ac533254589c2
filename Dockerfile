# GPU image on NGC PyTorch; the default is Dockerfile.sglang.  Training ranks in the container's own Python, SGLang servers in
# /opt/sglang.
# NOT BUILT: no registry and no GPU were available.  Its steps (tools/build_image.sh) were run outside a container:
# docs/install.md.  Build:  docker build -t megatron_rl .
#
# Two environments, because SGLang pins its torch exactly and NGC builds its own.  With rollout.weight_sync = "distributed"
# ranks and servers form one NCCL communicator, and NCCL refuses different versions: then the build stops and names the remedy.
ARG NGC_TAG=26.05-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}
WORKDIR /opt/megatron_rl
ARG SERVER_NCCL=""
ARG CHECK_NCCL=1

# Each environment is a layer that a change of the project's own files does not build again.
COPY requirements-sglang.txt ./
COPY tools/build_image.sh tools/
RUN bash tools/build_image.sh system servers

COPY requirements.txt ./
COPY tools/image_packages.py tools/
RUN bash tools/build_image.sh trainer

COPY . .
RUN bash tools/build_image.sh project check

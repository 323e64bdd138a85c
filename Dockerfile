# One image for every role. Not built in CI: no Docker was at hand.
#
#   docker build -t pipelinerl .                                   torch with CUDA, from the package index
#   docker build -t pipelinerl --build-arg TORCH_INDEX=URL .       torch from URL, for example PyTorch's index of CPU builds
#   docker run --rm --gpus all --shm-size 8g -v $PWD/runs:/data/runs pipelinerl run tiny
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install --yes --no-install-recommends bubblewrap g++ \
 && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=1

# Requirements first, so that a change of the sources does not install them again.
WORKDIR /usr/src/pipelinerl
COPY requirements requirements
RUN pip install --require-hashes --requirement requirements/build.txt \
 && pip install --require-hashes --requirement requirements/main.txt \
 && if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "$(grep ^torch== requirements/torch.in)"; \
    else pip install --require-hashes --requirement requirements/torch.txt --requirement requirements/torch-cuda.txt; fi

COPY . .
RUN pip install .

WORKDIR /data
ENTRYPOINT ["pipelinerl"]
CMD ["--help"]

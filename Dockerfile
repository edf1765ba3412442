# Penstock on CPU:
#   docker build -t penstock:cpu .
#   docker run --shm-size=1g -p 8000:8000 -v penstock:/data penstock:cpu
FROM python:3.11.14-slim-bookworm AS build
RUN python -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
# A layer of its own: the largest part, and the one that changes least.
RUN pip install --no-cache-dir torch==2.13.0+cpu torchvision torchaudio \
        --index-url https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN pip install --no-cache-dir --constraint constraints/cpu.txt ".[cpu]"

FROM python:3.11.14-slim-bookworm
# vLLM's CPU build compiles small kernels at run time and links OpenMP and NUMA.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home penstock && install --directory --owner=penstock /data
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PENSTOCK_CACHE=/data/cache HF_HOME=/data/huggingface
USER 10001
WORKDIR /home/penstock
EXPOSE 8000
# Healthy when every model has a ready replica; loading a large one takes minutes.
# `penstock status` finds the service, whatever its port, and with TLS, too.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m CMD ["penstock", "status"]
# Ray keeps its object store in /dev/shm: --shm-size gives it room.
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000"]

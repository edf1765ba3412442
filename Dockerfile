# Penstock on CPU: docker build -t penstock:cpu . && docker run -p 8000:8000 penstock:cpu
FROM python:3.11-slim-bookworm

# vLLM's CPU build compiles small kernels at run time and links OpenMP and NUMA.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/penstock
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir torch==2.13.0+cpu torchvision torchaudio \
        --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --constraint constraints.txt ".[cpu]"

EXPOSE 8000
# Ray keeps its object store in /dev/shm: give it room with --shm-size=1g.
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0"]

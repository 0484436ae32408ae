FROM python:3.12-slim-bookworm
# Triton compiles its launchers with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY producer producer
COPY worker worker
COPY engine engine
COPY kernels kernels
RUN pip install --no-cache-dir --constraint constraints.txt '.[worker,metrics]'
RUN useradd --create-home worker
USER worker
# Large replies and payloads come and go: keep their memory instead of returning it to the kernel after each job.
ENV PYTHONUNBUFFERED=1 MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=268435456
ENV RQ_WORKER_CLASS=worker.GpuWorker RQ_JOB_CLASS=worker.rq_classes.SafeJob RQ_QUEUE_CLASS=worker.rq_classes.SafeQueue
CMD ["python", "-m", "worker", "run"]

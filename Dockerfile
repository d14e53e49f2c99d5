# syntax=docker/dockerfile:1
# Two images of one file:
#   docker build -t refitd .                     the daemon: no torch, no compiler, an unprivileged user
#   docker build --target demo -t refitd-demo .  everything that `make demo` and `make test` need, on the CPU
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir --upgrade pip
COPY constraints.txt pyproject.toml README.md LICENSE ./
# The dependencies change rarely: their layer is made before the sources are copied.
RUN mkdir -p refitd clients/python/refit_client clients/megatron/refit_megatron clients/vllm/refit_vllm \
    && printf '__version__ = "0"\n' > refitd/__init__.py \
    && touch clients/python/refit_client/__init__.py clients/megatron/refit_megatron/__init__.py \
       clients/vllm/refit_vllm/__init__.py \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt . \
    && /venv/bin/pip uninstall -y refitd
COPY refitd refitd
COPY clients clients
RUN /venv/bin/pip install --no-cache-dir --no-deps .

FROM python:${PYTHON}-slim AS demo
RUN apt-get update && apt-get install -y --no-install-recommends make git tini && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE Makefile ./
COPY scripts scripts
COPY refitd refitd
COPY clients clients
COPY protos protos
COPY tests tests
COPY deploy deploy
COPY docs docs
RUN REFITD_DEVICE=cpu scripts/setup.sh .venv && rm -rf /root/.cache
ENTRYPOINT ["tini", "--"]
CMD ["make", "demo"]

FROM python:${PYTHON}-slim AS daemon
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && install -d -o 65532 -g 65532 /var/lib/refitd
COPY --from=wheel /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 \
    REFITD_DATA_DIR=/var/lib/refitd
USER 65532:65532
VOLUME /var/lib/refitd
EXPOSE 7077 9464
# Asks the standard gRPC health service at REFITD_SERVER (default 127.0.0.1:7077), with the container's own settings.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["refitd", "doctor", "--server-only", "--timeout", "3"]
# tini forwards SIGTERM, on which the daemon drains, and reaps.
ENTRYPOINT ["tini", "--", "refitd"]
# Loopback inside the container reaches nobody. 0.0.0.0 needs TLS, or --insecure on a network that is trusted as a whole.
CMD ["serve"]

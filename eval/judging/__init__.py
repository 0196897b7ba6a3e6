"""Vision-language models that rerank candidates or rewrite queries."""

"""Vision-language models that judge: endpoints, answers that are kept, yes or no."""

"""An OpenAI-compatible server in front of engines that share one model."""

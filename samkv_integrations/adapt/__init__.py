"""Learning a prefix for a model: self-distillation, with the model frozen (docs/adapt.md)."""

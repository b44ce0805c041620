"""Models in Hugging Face's format."""

from shoal.spec.hugging_face import hf_config


def export_fresh(shape, folder) -> None:
    """Write an untrained model as transformers would."""
    import transformers

    values = hf_config(shape, "float32", "test")
    kind = getattr(transformers, values["architectures"][0])
    kind(kind.config_class(**values)).save_pretrained(folder)

"""What tests feed honed with: templates, tokenizers, tiny models, data sets."""

"""From a model name to weights in place: finding, downloading, configuration, tensors, conversion."""

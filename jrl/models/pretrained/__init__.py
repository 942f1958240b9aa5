"""Published weights in and out: safetensors folders, PEFT adapters, classifiers."""

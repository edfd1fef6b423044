"""Where work runs: CUDA devices and streams, lanes beside the caller, and steps that later calls replay."""

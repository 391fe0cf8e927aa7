"""What tests share: tiny models, fakes that pass the same suites as the real parts, clusters."""

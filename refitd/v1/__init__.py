"""Generated from protos/refitd/v1 by protos/generate.sh; do not edit."""

"""What tests share: models, engines, reference implementations."""

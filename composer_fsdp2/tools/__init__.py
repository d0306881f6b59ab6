"""Programs around the product: migrate, parity and doctor."""

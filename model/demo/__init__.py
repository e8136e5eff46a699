"""``auxhead demo``: trains a small ResNet-18 with eight heads, calibrates it, and lets real images leave early."""

"""What msprobe has for all frameworks, as far as it is here."""

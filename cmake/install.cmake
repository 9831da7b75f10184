# Replaced below by the package rules.

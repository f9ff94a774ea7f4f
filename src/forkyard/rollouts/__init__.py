"""Rollouts and evals: from sandboxes to rewards that can be trusted. Uses the public client alone."""

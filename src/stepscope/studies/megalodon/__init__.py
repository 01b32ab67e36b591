"""The megalodon study."""

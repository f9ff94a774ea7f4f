"""What a sandbox may reach, decided and done on the host.

``policy`` decides, ``presets`` reads rules out of this machine's own configuration, ``sniff``
checks that a connection says the name it was opened for, ``reach`` connects, and ``broker``
carries the bytes and keeps the account.
"""

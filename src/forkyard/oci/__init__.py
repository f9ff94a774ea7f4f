"""Container images as files: references, manifests, layers unpacked and packed, and the tools that
build and copy them (Debian's buildah and skopeo).

Nothing here knows of templates or sandboxes. ``unpack`` and ``pack`` run as programs of their
own, so that a thousand files of somebody's image neither hold up the daemon nor run in it.
"""

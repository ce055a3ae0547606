#!/usr/bin/env bash
# Makes a Debian tree for 64-bit ARM with our dependencies in FOLDER, and runs a command in it, emulated:
#     tools/arm64_tree.sh FOLDER COMMAND...
# Needs root, and debootstrap, qemu-user-static and binfmt-support of Debian.
set -euo pipefail
folder=$(realpath -m "$1"); shift
root=$folder/root here=$PWD pip=$PWD/.venv/bin/pip
mkdir -p "$folder"
if [ ! -e "$folder/ready" ]; then
    mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    update-binfmts --enable qemu-aarch64
    debootstrap --arch=arm64 --variant=minbase \
        --include=python3,gcc,libc6-dev,libgomp1 bookworm "$root"
    platforms=()
    for version in 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do
        platforms+=(--platform "manylinux_${version}_aarch64")
    done
    # torch's wheel for ARM with no CUDA; constraints.txt pins one for other machines
    grep -vi '^torch==' constraints.txt > "$folder/constraints.txt"
    "$pip" install --quiet --target "$root/site" "${platforms[@]}" --platform manylinux2014_aarch64 \
        --only-binary=:all: --python-version 311 --implementation cp --no-warn-conflicts \
        -c "$folder/constraints.txt" torch==2.9.1 transformers tokenizers pillow safetensors gguf \
        huggingface_hub numba numpy msgspec starlette uvicorn uvloop httptools python-multipart websockets jinja2 \
        llguidance prometheus-client rich prompt_toolkit click httpx backports.zstd pytest pytest-timeout anyio hypothesis
    "$pip" install --quiet --target "$root/site" --no-deps .  # for its version; the sources come first
    touch "$folder/ready"
fi
mkdir -p "$root/tree"
for name in proc dev tree; do mountpoint -q "$root/$name" && umount "$root/$name"; done
mount --bind /proc "$root/proc" && mount --bind /dev "$root/dev" && mount --bind "$here" "$root/tree"
trap 'umount "$root/proc" "$root/dev" "$root/tree"' EXIT
chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 OMP_NUM_THREADS=1 \
    PYTHONPATH=/tree/src:/tree:/site PYTHONDONTWRITEBYTECODE=1 sh -c 'cd /tree && exec "$@"' sh "$@"

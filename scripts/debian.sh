# Makes fresh Debians and runs commands in them: sourced by fresh.sh and installs.sh, which set `folder`, where they are made (empty: a temporary
# one), and `keep`, not empty if they shall stay there.
repository=$(cd "$(dirname "$0")/.." && pwd)
fail() { printf '%s\n' "$@" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "$(basename "$0") makes a Debian and mounts what that needs: please run it as root."
command -v debootstrap >/dev/null ||
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >/dev/null; } ||
  fail "debootstrap is missing and can't be installed by apt-get."

# apart COMMAND...: with mounts and processes of its own, which end with it whatever ends it
apart() {
  unshare --mount --pid --fork --kill-child --mount-proc "$@" </dev/null &
  child=$!
  local status=0
  wait "$child" || status=$?
  child=
  return "$status"
}

roots=() child=
clean_up() {
  local root
  # First of all processes is the child of unshare, and unshare waits for it.
  [ -z "$child" ] || { pkill -KILL -P "$child" && wait "$child"; } 2>/dev/null || true
  [ -z "$keep" ] || { printf 'kept: %s\n' "${roots[@]}"; return; }
  # Nothing is mounted there by now; one file system, in case that is ever wrong.
  for root in "${roots[@]}"; do rm -rf --one-file-system "$root" "$root.log"; done
  [ -z "${own_folder:-}" ] || rmdir "$own_folder"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
if [ -z "$folder" ]; then folder=$(mktemp -d) own_folder=$folder; fi
mkdir -p "$folder"

# What a program needs to reach the package indexes from here. Of this machine's files, a Debian has the certificates alone.
carried=(LANG=C.UTF-8 "TERM=${TERM:-dumb}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while IFS='=' read -r name value; do
  kept=
  for word in $value; do
    case $word in /etc/ssl/*) ;; file:* | /*) continue ;; esac
    kept+=${kept:+ }$word
  done
  [ -z "$kept" ] || carried+=("$name=$kept")
done < <(
  python3 -m pip config list 2>/dev/null | sed -nE "s/^[a-z]+\.([a-z-]+)='(.*)'$/\1\t\2/p" |
    while IFS=$'\t' read -r key value; do key=PIP_${key^^}; printf '%s=%s\n' "${key//-/_}" "$value"; done
  env | grep -E '^(PIP_[A-Z_]+|[A-Za-z]+_proxy|[A-Z]+_PROXY|TESSERA_TORCH_INDEX)=' || true
)

# debian VERSION ROOT: installs one
debian() {
  local suite mirror=
  case $1 in 12) suite=bookworm ;; 13) suite=trixie ;; esac
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1) || true
  apart debootstrap --variant=minbase --include=ca-certificates,git,python3,sudo "$suite" "$2" ${mirror:+"$mirror"} >"$2.log" 2>&1 ||
    fail "$(tail -n 20 "$2.log")" "Debian $1 can't be installed into $2."
  { apt-config dump | grep -E '^Acquire::(https?|Check|Retries|Force)' || true; } >"$2/etc/apt/apt.conf.d/99host"
  cp -L --remove-destination /etc/resolv.conf /etc/hosts "$2/etc/"
  if [ -d /usr/local/share/ca-certificates ]; then
    cp -rT /usr/local/share/ca-certificates "$2/usr/local/share/ca-certificates"
    chroot "$2" update-ca-certificates >/dev/null 2>&1
  fi
  chroot "$2" useradd --create-home --shell /bin/bash user
  echo 'user ALL=(ALL) NOPASSWD: ALL' >"$2/etc/sudoers.d/user"
  # No hard links: the files get another owner.
  git clone --quiet --no-hardlinks "$repository" "$2/home/user/tessera"
  chroot "$2" chown -R user:user /home/user/tessera
}

# inside ROOT COMMAND: runs it as the user, in the clone
inside() {
  apart bash -c '
    set -e
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    mount --rbind /sys "$1/sys"
    root=$1 line=$2
    shift 2
    exec chroot "$root" env -i "$@" su user -c "cd ~/tessera && $line"' \
    inside "$1" "$2" "${carried[@]}"
}

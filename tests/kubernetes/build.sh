#!/bin/sh
# Brings the programs of a Kubernetes cluster into target/kubernetes/<hash of this script>/bin: kube-apiserver, kube-scheduler,
# kube-controller-manager, kubelet and kube-proxy are built from Debian's source package, which takes five to ten minutes of two processors, 3 GB of
# disk meanwhile and 600 MB afterwards. etcd, kubectl, containerd, runc and iptables are Debian's programs, taken from their packages without
# installing those. The CNI plugins are in the folder `cni`, the extensions of iptables in `xtables`. Prints the folder.
# Idempotent. With --find nothing is built: exits with 1 when there is none.
set -eu
cd "$(dirname "$0")/../.."

version='1.20.5+really1.20.2-1.1+deb12u1'
release=1.20.2
programs='kube-apiserver kube-scheduler kube-controller-manager kubelet kube-proxy'

target=${CARGO_TARGET_DIR:-$PWD/target}
hash=$(sha256sum tests/kubernetes/build.sh | cut -c 1-12)
wanted=$target/kubernetes/$hash
if [ -d "$wanted" ]; then
    echo "$wanted"
    exit 0
fi
[ "${1:-}" != --find ] || exit 1

mkdir -p "$target/kubernetes"
exec 9>"$target/kubernetes/.lock"
flock 9
if [ -d "$wanted" ]; then
    echo "$wanted"
    exit 0
fi
for tool in go dpkg-source apt-get; do
    command -v "$tool" >/dev/null || {
        echo "tests/kubernetes/build.sh: $tool is missing: install golang-go and dpkg-dev" >&2
        exit 1
    }
done

# All that is downloaded and compiled is in here, apt's lists too: the host's configuration of apt stays as it is.
work=$target/kubernetes/.partial
rm -rf "$work" "$work.done"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$work/bin" "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/packages" "$work/go/src/k8s.io"
sed 's/^Types: deb$/Types: deb deb-src/' tests/debian.sources >"$work/apt/debian.sources"
apt() {
    apt-get -q -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$work/apt/debian.sources" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" -o Acquire::Languages=none "$@" >&2
}
echo "building Kubernetes $release …" >&2
apt update
(
    cd "$work/packages"
    apt download etcd-server kubernetes-client golang-github-modern-go-reflect2-dev containerd runc containernetworking-plugins iptables busybox-static
    apt source --download-only "kubernetes=$version"
    for package in *.deb; do
        dpkg-deb -x "$package" files
    done
    dpkg-source --no-check -x kubernetes_*.dsc "$work/go/src/k8s.io/kubernetes" >&2
)
for program in bin/etcd bin/kubectl bin/containerd bin/containerd-shim-runc-v2 bin/ctr sbin/runc sbin/xtables-nft-multi; do
    cp "$work/packages/files/usr/$program" "$work/bin/"
done
cp "$work/packages/files/bin/busybox" "$work/bin/"
# Kubelet and kube-proxy look for these words, which the package makes as alternatives.
for word in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
    ln -s xtables-nft-multi "$work/bin/$word"
done
cp -r "$work/packages/files/usr/lib/cni" "$work/cni"
cp -r "$work/packages/files/usr/lib/x86_64-linux-gnu/xtables" "$work/xtables"

cd "$work/go/src/k8s.io/kubernetes"
export GO111MODULE=off GOPATH="$work/go" GOCACHE="$work/cache" GOTMPDIR="$work" GOFLAGS=-p="${CARGO_BUILD_JOBS:-$(nproc)}" CGO_ENABLED=0 GOTOOLCHAIN=local
# The vendored one reads the runtime's maps as they were before Go 1.18, and crashes.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$work/packages/files/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/reflect2
# It takes "" for null: since Go 1.18, the value in an interface is at the same place as the zero value that it is compared with.
zero='data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))'
grep -qF "$zero" vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go
sed -i "s/$zero/data == nil/" vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go
# Kubelet gives the path of a device plugin's socket as the authority of its requests, which is none (RFC 3986, 3.2). From 1.26 on it gives localhost.
plugin=pkg/kubelet/cm/devicemanager/endpoint.go
grep -qF 'grpc.DialContext(ctx, unixSocketPath, grpc.WithInsecure(),' "$plugin"
sed -i 's/grpc.DialContext(ctx, unixSocketPath, grpc.WithInsecure(),/& grpc.WithAuthority("localhost"),/' "$plugin"
# The API's schema is not in the source package. The program that makes it is.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(
    {
        grep -Rl '+k8s:openapi-gen=true' --include='*.go' --exclude-dir=testdata pkg vendor/k8s.io | xargs -n 1 dirname
        for package in apis/meta/v1 runtime version api/resource util/intstr; do
            echo "vendor/k8s.io/apimachinery/pkg/$package"
        done
    } | grep -v -e /code-generator/ -e /sample-apiserver/ | sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -s -d ,
)
"$work/openapi-gen" --logtostderr -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" >&2
flags='-s -w'
for package in component-base/version client-go/pkg/version; do
    package=k8s.io/kubernetes/vendor/k8s.io/$package
    flags="$flags -X $package.gitVersion=v$release -X $package.gitMajor=1 -X $package.gitMinor=20"
done
for program in $programs; do
    go build -ldflags "$flags" -o "$work/bin/$program" "./cmd/$program"
done
cd "$target"

# What is complete has the final name. Programs of an earlier script go.
for old in "$target"/kubernetes/*/; do
    rm -rf "$old"
done
mkdir "$work.done"
mv "$work/bin" "$work/cni" "$work/xtables" "$work.done/"
mv "$work.done" "$wanted"
echo "$wanted"

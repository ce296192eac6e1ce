"""Conan recipe that builds the clone that it lies in, with the libraries of the system. The configuration user.tessera:torch names libtorch's folder."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load
from conan.tools.system.package_manager import Apt


class Tessera(ConanFile):
    name = "tessera"
    license = "Apache-2.0"
    description = "Trains libtorch models too large for one worker"
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"models": [True, False], "vision": [True, False], "cli": [True, False]}
    default_options = {"models": False, "vision": False, "cli": True}

    def clone(self):
        return os.path.normpath(os.path.join(self.recipe_folder, "..", ".."))

    def set_version(self):
        self.version = re.search(r'define TESSERA_VERSION "(.*)"', load(self, os.path.join(self.clone(), "tessera/version.h"))).group(1)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "tessera/*"):
            copy(self, pattern, self.clone(), self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def torch(self):
        return self.conf.get("user.tessera:torch", os.environ.get("TESSERA_TORCH", ""))

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("Tessera runs on Linux")
        if not os.path.isdir(os.path.join(self.torch(), "lib")):
            raise ConanInvalidConfiguration(f"no libtorch in '{self.torch()}': name the folder with its include/ and lib/, by -c user.tessera:torch=FOLDER")

    def system_requirements(self):
        packages = "libcurl4-openssl-dev libdeflate-dev libfmt-dev libxxhash-dev libyaml-cpp-dev nlohmann-json3-dev zlib1g-dev".split()
        packages += ["libcli11-dev"] if self.options.cli else []
        packages += ["libutf8proc-dev"] if self.options.models else []
        packages += ["libjpeg-dev", "libpng-dev", "libwebp-dev"] if self.options.vision else []
        Apt(self).install(packages, check=True)

    def generate(self):
        toolchain = CMakeToolchain(self)
        packages = ["core", *(name for name in ("models", "vision", "cli") if self.options.get_safe(name))]
        for name, value in {"TESSERA_PACKAGES": ";".join(packages), "TESSERA_TORCH": self.torch(), "TESSERA_TESTS": "OFF", "TESSERA_EXAMPLES": "OFF"}.items():
            toolchain.cache_variables[name] = value
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # Programs find the CMake package that is installed: find_package(Tessera).
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "Tessera")]
        self.cpp_info.libs = ["tessera"]
        self.runenv_info.append_path("PATH", os.path.join(self.package_folder, "bin"))

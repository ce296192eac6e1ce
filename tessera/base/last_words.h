// The message with which a program ends if nobody has caught an exception.
#pragma once

#include <string>
#include <string_view>

namespace c10 {
class Error;
}

namespace tessera {

/// Installs a terminate handler. The first Error that is made and init() call this function; only the first call does something. From then
/// on, an Error of Tessera or of libtorch that nobody catches ends the process with status 1 and "PROGRAM: message" on standard error,
/// instead of "terminate called" and a core. Messages of libtorch also name the unit that this thread used last, and have the stack trace
/// only if TORCH_SHOW_CPP_STACKTRACES=1 asks for it. Other exceptions go to the handler that the program had. Every std::exception is
/// recorded for the launcher.
void say_last_words();

/// Notes where this thread is, for the message: "backward" of unit "layers.3".
void note_place(std::string_view phase, std::string_view unit);

/// The message of an error of libtorch without its stack trace, unless TORCH_SHOW_CPP_STACKTRACES=1 asks for it.
std::string message_without_calls(const c10::Error& error);

}  // namespace tessera
